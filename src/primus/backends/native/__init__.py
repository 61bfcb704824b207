"""The native backend: a decoder-only transformer trained with torch's own distributed parts."""
