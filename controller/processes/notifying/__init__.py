"""The notifier process, and the flags of `holdfast up` for webhooks."""
