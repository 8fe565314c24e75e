"""What people look at: pages, charts, tables and pictures."""
