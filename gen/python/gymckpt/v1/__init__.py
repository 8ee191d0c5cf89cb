"""Generated from protos/gymckpt/v1 by `make gen`. Do not edit."""
