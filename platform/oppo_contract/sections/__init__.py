"""The sections of a `RunSpec`, one file a subject. Import them from `oppo_contract.spec`."""
