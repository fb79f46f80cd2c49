#!/bin/sh
# Installs what NCCL needs for AWS's EFA: libfabric, the plugin aws-ofi-nccl and AWS's rdma-core, which replaces Ubuntu's.
#   efa.sh VERSION SHA256     SHA256: of aws-efa-installer-VERSION.tar.gz. Without a version nothing is installed.
# The kernel's module is the node's, and a build has no device to verify. The plugin may only have a name that NCCL does not
# look for by itself.
set -eu
version=${1-} sha256=${2-}
[ -n "$version" ] || exit 0
archive=aws-efa-installer-$version.tar.gz
if [ -z "$sha256" ]; then
    echo "EFA_INSTALLER needs EFA_SHA256, the SHA-256 of $archive" >&2
    exit 2
fi
folder=$(mktemp -d)
cd "$folder"
wget --quiet "https://efa-installer.amazonaws.com/$archive"
echo "$sha256  $archive" | sha256sum --check -
tar -xf "$archive"
apt-get update
apt-get remove --yes ibverbs-providers libibverbs1
cd aws-efa-installer
./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify
ldconfig
echo NCCL_NET_PLUGIN=ofi | tee /etc/nccl.conf
rm -rf "$folder" /var/lib/apt/lists/*
