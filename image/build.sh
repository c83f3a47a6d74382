#!/bin/sh
# Builds the image with the first container engine that works: docker, podman or buildah.
#
#   image/build.sh NAME:TAG [BASE]
#
# ENGINE names the one to use. BASE is another base image, with its digest.
set -eu
cd "$(dirname "$0")/.."
name=${1:?usage: image/build.sh NAME:TAG [BASE]}
base=${2:-}

works() {
    command -v "$1" >/dev/null && "$1" info >/dev/null 2>&1
}

engine=${ENGINE:-}
for one in docker podman buildah; do
    [ -n "$engine" ] || ! works "$one" || engine=$one
done
if [ -z "$engine" ]; then
    echo "build.sh: none of docker, podman and buildah works here. Without them: make image-archive (docs/install.md)" >&2
    exit 1
fi

commit=$(python3 -c 'from image.environment import find_commit; print(find_commit())')
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}"
set -- --build-arg "MGPU_COMMIT=$commit" --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" --tag "$name" .
[ -z "$base" ] || set -- --build-arg "BASE=$base" "$@"
case $engine in
    # One layer for each COPY, as docker makes them. BuildKit reads SOURCE_DATE_EPOCH; the others have an option.
    *podman | *buildah) set -- --layers --timestamp "$SOURCE_DATE_EPOCH" "$@" ;;
esac
echo "build.sh: $engine builds $name from commit $commit"
exec "$engine" build "$@"
