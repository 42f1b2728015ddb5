"""Diagnosis of error messages, logs, pictures and sound: cause, evidence and remedy."""
