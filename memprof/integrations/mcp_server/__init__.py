"""A server of the Model Context Protocol, through which agents record, explain and plan."""
