"""What each command does with its options; one module per command, imported when it is called."""
