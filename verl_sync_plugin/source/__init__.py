"""Parameter sources: what one trainer rank holds of the model, as flat shards with HF names."""
