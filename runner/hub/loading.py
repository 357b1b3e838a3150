"""From a hub model's files to a network, and the proof that it computes what the library does."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch._guards import detect_fake_mode

from runner.contracts import Fault, Unsupported, UserError
from runner.hub.model import Hub
from runner.hub.network import SEAM, HubNetwork, attend, layers_of
from runner.hub.proof import disagreement
from runner.hub.shapes import HubShapes
from runner.hub.source import folder_of

SHAPES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "vocab": "vocab_size",
}
"""Shapes that the JSON and the library must agree on, by the library's names."""


def built(spec: Hub, seed: int) -> HubNetwork:
    """See `Hub.build`."""
    with own_random_state(seed), library() as lib:
        config = config_of(spec, lib)
        if detect_fake_mode() is not None:
            # A prediction wants shapes; values, to load and to prove something on, there are none.
            return adapted(initial(spec, config, lib).float(), spec.shapes)
        model = initial(spec, config, lib) if spec.random_init else with_weights(spec, config, lib)
        network = adapted(model.float(), spec.shapes)
        against = disagreement(network, model)
    if against:
        raise refused(spec, against)
    if not spec.random_init:
        network.initial_weights = digest(network)
    return network


def digest(network: nn.Module) -> str:
    """Hex sha256 over the names and values of all parameters."""
    found = hashlib.sha256()
    for name, parameter in sorted(network.named_parameters()):
        found.update(name.encode())
        found.update(parameter.detach().contiguous().numpy().data)
    return found.hexdigest()


def counted(spec: Hub) -> tuple[int, int]:
    """(params, matmul_params) of the architecture, counted on a model without storage."""
    with own_random_state(0), torch.device("meta"), library() as lib:
        network = adapted(initial(spec, config_of(spec, lib), lib), spec.shapes)
    params = sum(p.numel() for p in network.parameters())
    matrices = sum(m.weight.numel() for m in network.body.modules() if isinstance(m, nn.Linear))
    return params, matrices + network.head_weight.numel()


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Random numbers of the CPU from `seed` inside; the global state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def library() -> Iterator[Any]:
    """The library, quiet, with the seam among its attention implementations."""
    try:
        import transformers
    except ImportError as error:
        raise Unsupported("model=hf needs transformers: pip install 'fullstep[hub]'") from error
    transformers.AttentionInterface.register(SEAM, attend)
    log = transformers.utils.logging
    before, shown = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield transformers
    finally:
        log.set_verbosity(before)
        if shown:
            log.enable_progress_bar()


def config_of(spec: Hub, lib: Any) -> Any:
    """The library's config, with the seam as its attention and the chosen dropouts."""
    where = str(folder_of(spec.path or "") or spec.path)
    try:
        config = lib.AutoConfig.from_pretrained(
            where, revision=spec.revision, trust_remote_code=False
        )
    except Exception as error:  # each class of configs has errors of its own
        raise refused(spec, " ".join(str(error).split())) from error
    for own, theirs in SHAPES.items():
        read, loaded = getattr(spec.shapes, own), getattr(config, theirs, None)
        if read != loaded:
            raise refused(spec, f"{theirs}={loaded} for the library, {read} in config.json")
    if spec.dropout is not None:
        for key in dropouts(config):
            setattr(config, key, spec.dropout)
    config._attn_implementation = SEAM
    config.use_cache = False
    return config


def dropouts(config: Any) -> list[str]:
    """Names of the config's rates of dropout."""
    return [
        key
        for key, value in config.to_dict().items()
        if "drop" in key and isinstance(value, int | float) and not isinstance(value, bool)
    ]


def initial(spec: Hub, config: Any, lib: Any) -> Any:
    """The model with the initial weights of its architecture."""
    try:
        return lib.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (KeyError, ValueError) as error:
        raise refused(
            spec, f"no such decoder, or none with an attention of ours: {error}"
        ) from error


def with_weights(spec: Hub, config: Any, lib: Any) -> nn.Module:
    """The model with its stored weights; raises UserError unless each has its place."""
    where = str(folder_of(spec.path or "") or spec.path)
    try:
        model, info = lib.AutoModelForCausalLM.from_pretrained(
            where,
            config=config,
            revision=spec.revision,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise refused(spec, str(error).partition("\n")[0]) from error
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        listed = "; ".join(f"{kind}: {', '.join(names[:3])}" for kind, names in wrong.items())
        raise refused(spec, f"weights that do not fit its config ({listed})")
    loaded: nn.Module = model
    return loaded


def adapted(model: Any, shapes: HubShapes) -> HubNetwork:
    """The contract's network over the library's model, whose matrices become `nn.Linear`, as
    recipes and adapters know them."""
    body = model.base_model
    layers_of(body, shapes.layers)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise Unsupported(f"model: {type(model).__name__} has a head that is not one plain matrix")
    tied = head.weight is body.get_input_embeddings().weight
    replace_transposed(body)
    arguments = inspect.signature(body.forward).parameters
    return HubNetwork(
        body=body,
        head=None if tied else head,
        description=shapes,
        logit_factor=logit_factor(model.config),
        takes_positions="position_ids" in arguments,
    )


def logit_factor(config: Any) -> float:
    """What the architecture multiplies its logits by (Granite divides, Cohere multiplies)."""
    divisor = getattr(config, "logits_scaling", None) or 1.0
    factor = getattr(config, "logit_scale", None) or 1.0
    return float(factor / divisor)


def replace_transposed(body: nn.Module) -> None:
    """Put a linear layer in the place of each of the library's layers with a transposed matrix
    (GPT-2's): the same product."""
    from transformers.pytorch_utils import Conv1D

    for module in list(body.modules()):
        for name, child in module.named_children():
            if isinstance(child, Conv1D):
                setattr(module, name, linear_of(child))


def linear_of(layer: Any) -> nn.Linear:
    """The linear layer that computes what `layer` does."""
    rows, columns = layer.weight.shape
    with torch.device("meta"):
        made = nn.Linear(rows, columns)
    made.weight = nn.Parameter(layer.weight.detach().T.contiguous())
    made.bias = nn.Parameter(layer.bias.detach())
    return made


def refused(spec: Hub, why: str) -> UserError:
    """The fault of a model that cannot be trained as it is."""
    return UserError(
        Fault(
            key="model.path",
            given=f"{spec.path}: {why}",
            allowed="a decoder of transformers whose own logits this project reproduces",
            next_step="choose another model, or random_init=true where only weights are wrong",
        )
    )
