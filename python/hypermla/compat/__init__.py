"""Other libraries' calls, made by this one: `import hypermla.compat.flash_mla as flash_mla` (docs/drop-ins.md)."""
