"""Sections of `RunSpec`. Import them from `oppo_contract.spec`."""
