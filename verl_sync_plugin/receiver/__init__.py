"""What runs inside SGLang's scheduler process. Never imports verl."""
