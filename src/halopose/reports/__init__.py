"""Reports: html pages, charts, tables and pictures."""
