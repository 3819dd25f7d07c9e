"""Names that only exist so that older programs import; nothing of ours uses them."""
