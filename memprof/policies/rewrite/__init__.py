"""What predictions rewrite a step with."""
