"""A spec as KubeRay manifests: options, pod groups, documents. Pure: nothing asks a cluster."""
