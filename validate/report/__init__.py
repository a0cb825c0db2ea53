"""Shows a run to somebody: rows, tables, plots, the verdict, `report.html` and `report.ipynb`."""
