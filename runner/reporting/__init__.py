"""A comparison as tables, plots and a page; nothing is judged here."""
