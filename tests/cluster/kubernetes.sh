#!/bin/bash
# A Kubernetes API server on this machine, for tests: etcd and kube-apiserver, no nodes. Debian.
#
#   kubernetes.sh install      packages, and kube-apiserver compiled into $PRIMUS_TEST_KUBERNETES (about 8 minutes, once)
#   kubernetes.sh up DIR       start both with their state in DIR, which then holds a kubeconfig with the users admin
#                              (may do everything), poor (may do nothing) and late (whose token is not valid)
#   kubernetes.sh down DIR     end what `up` has started
#
# Debian ships the server as source only: its package `kubernetes` of bookworm holds the whole tree of 1.20.
set -u
here=$(cd "$(dirname "$0")" && pwd)
cache=${PRIMUS_TEST_KUBERNETES:-/var/cache/primus-test-kubernetes}
version=v1.20.2

build() { # compile the API server in a folder of its own
    work=$(mktemp -d /var/tmp/primus-kubernetes.XXXXXX)
    trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
    mkdir -p "$work/lists/partial" "$work/archives/partial" "$cache"
    site=$(apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' | grep -v security | head -n 1)
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${site:-http://deb.debian.org/debian/} bookworm main" >"$work/sources.list"
    cd "$work" || return 1
    set -- -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$work/lists" \
        -o "Dir::Cache=$work" -o APT::Sandbox::User=root
    apt-get "$@" update && apt-get "$@" source kubernetes || return 1
    cd kubernetes-1.20*/ || return 1
    # The vendored reflect2 of 2018 reads Go's internals as they were before 1.18, and crashes; Debian's own does not.
    rm -f vendor/github.com/modern-go/reflect2/*
    cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.go /usr/share/gocode/src/github.com/modern-go/reflect2/*.s \
        vendor/github.com/modern-go/reflect2/
    rm -f vendor/github.com/modern-go/reflect2/*_test.go
    mkdir -p "$work/go/src/k8s.io"
    ln -s "$PWD" "$work/go/src/k8s.io/kubernetes"
    export GOPATH=$work/go GO111MODULE=off GOFLAGS='' GOPROXY=off CGO_ENABLED=0 GOCACHE=$work/gocache
    cd "$work/go/src/k8s.io/kubernetes" || return 1
    # Descriptions of the API's types are generated, and not part of the source.
    go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen || return 1
    packages=$(grep -rlE --include='*.go' '^// \+k8s:openapi-gen=' pkg cmd plugin staging/src/k8s.io |
        grep -vE 'code-generator|sample-apiserver|_test\.go|/testdata/' | xargs -n 1 dirname | sort -u |
        sed 's#^staging/src/#k8s.io/kubernetes/vendor/#; t; s#^#k8s.io/kubernetes/#' | paste -sd,)
    "$work/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations" >/dev/null || return 1
    flags='-s -w'
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        package=k8s.io/kubernetes/vendor/$package
        flags="$flags -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=20"
    done
    go build -tags providerless -ldflags "$flags" -o "$work/built/" ./cmd/kube-apiserver || return 1
    mv "$work/built/kube-apiserver" "$cache/"
}

if [ "${1-}" = install ]; then # by any shell: what follows is read by bash alone
    . "$here/packages.sh"
    install_packages etcd-server openssl || exit 1
    [ ! -x "$cache/kube-apiserver" ] || exit 0
    install_packages golang-go golang-github-modern-go-reflect2-dev dpkg-dev || exit 1
    build
    exit
fi
dir=${2-}
base=$((21000 + $(printf %s "$dir" | cksum | cut -d ' ' -f 1) % 2000 * 4))
server=https://127.0.0.1:$((base + 2))

fail() {
    echo "kubernetes.sh: $*" >&2
    tail -n 5 "$dir"/*.log >&2 2>/dev/null
    exit 1
}

start() { # NAME COMMAND...
    setsid "${@:2}" </dev/null >"$dir/$1.log" 2>&1 &
    echo $! >"$dir/$1.pid"
}

is_running() { # PID: a process that nobody collects stays, as a zombie
    case $(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) in '' | Z*) return 1 ;; esac
}

until_true() { # SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || return 1
        sleep 0.1
    done
}

is_ready() {
    is_running "$(cat "$dir/apiserver.pid")" || fail "kube-apiserver has ended"
    /usr/bin/python3 - "$server" "$dir/certs/apiserver.crt" <<'PY'
import ssl, sys, urllib.request
request = urllib.request.Request(sys.argv[1] + "/readyz", headers={"Authorization": "Bearer admin-token"})
urllib.request.urlopen(request, timeout=2, context=ssl.create_default_context(cafile=sys.argv[2]))
PY
}

write_kubeconfig() {
    cat >"$dir/kubeconfig" <<YAML
apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "$server", certificate-authority: $dir/certs/apiserver.crt}}]
users:
- {name: admin, user: {token: admin-token}}
- {name: poor, user: {token: poor-token}}
- {name: late, user: {token: late-token}}
contexts:
- {name: admin, context: {cluster: test, user: admin, namespace: default}}
- {name: poor, context: {cluster: test, user: poor, namespace: default}}
- {name: late, context: {cluster: test, user: late, namespace: default}}
current-context: admin
YAML
}

up() {
    mkdir -p "$dir"
    openssl genrsa -out "$dir/account.key" 2048 2>/dev/null || fail "openssl makes no key"
    printf '%s\n' 'admin-token,admin,1,"system:masters"' 'poor-token,poor,2' >"$dir/tokens.csv"
    write_kubeconfig
    local etcd=http://127.0.0.1:$base peers=http://127.0.0.1:$((base + 1))
    start etcd etcd --data-dir "$dir/etcd" --unsafe-no-fsync --listen-client-urls "$etcd" --advertise-client-urls "$etcd" \
        --listen-peer-urls "$peers" --initial-advertise-peer-urls "$peers" --initial-cluster "default=$peers"
    # No controller makes service accounts, and no proxy serves the addresses of Services (RFC 5737).
    start apiserver "$cache/kube-apiserver" --etcd-servers "$etcd" --bind-address 127.0.0.1 --advertise-address 127.0.0.1 \
        --secure-port $((base + 2)) --cert-dir "$dir/certs" --token-auth-file "$dir/tokens.csv" --authorization-mode RBAC \
        --disable-admission-plugins ServiceAccount --service-account-key-file "$dir/account.key" \
        --service-account-signing-key-file "$dir/account.key" --service-account-issuer https://kubernetes.default.svc \
        --service-cluster-ip-range 198.51.100.128/25 --endpoint-reconciler-type none \
        --kubelet-preferred-address-types InternalIP
    until_true 60 is_ready || fail "kube-apiserver is not ready"
}

down() {
    local name pid
    for name in apiserver etcd; do
        pid=$(cat "$dir/$name.pid" 2>/dev/null) || continue
        kill -TERM "$pid" 2>/dev/null
        for _ in $(seq 50); do
            is_running "$pid" || break
            sleep 0.1
        done
        ! is_running "$pid" || kill -KILL "$pid"
        rm -f "$dir/$name.pid"
    done
}

case ${1-} in
up | down) [ -n "$dir" ] && "$1" ;;
*)
    sed -n '2,11p' "$0"
    exit 2
    ;;
esac
