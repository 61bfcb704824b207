"""Results for people: tables and numbers with units."""
