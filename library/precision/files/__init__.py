"""The formats that models are deployed in: one module each, behind the interface of ``base``."""
