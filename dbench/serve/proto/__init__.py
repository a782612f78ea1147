"""The .proto file and the code that `make proto` generates from it."""
