"""Pure knowledge of MPS: text and log lines in, meaning out."""
