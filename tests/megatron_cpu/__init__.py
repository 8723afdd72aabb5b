"""What the Megatron tests share; in a package, so that spawned ranks can import it by name."""
