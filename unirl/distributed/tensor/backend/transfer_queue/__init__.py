"""Rows travel through a service: TransferQueue's storage actors, or a Mooncake store."""
