"""Generated from protos/gymckpt by `make gen`. Do not edit."""
