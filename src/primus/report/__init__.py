"""Human-readable results: tables, pictures, and numbers with units."""
