"""Output that survives faults: whole files or none, valid JSON, logs on a full disk."""
