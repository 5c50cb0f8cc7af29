"""What a real device allocated beside what a dry run did, allocation by allocation."""
