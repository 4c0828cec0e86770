"""Who starts and stops workers where no `holdfast up` does: a command, or what keeps a Kubernetes scale subresource."""
