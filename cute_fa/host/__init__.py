"""The path of one call on the host: is it legal (`validate`), is there a backend for it (`support`), which plan and which
kernel (`launch`, `cache`, `compile`); and what the compiler made of a plan (`inspect`, `cubin`)."""
