#!/usr/bin/env bash
# Manages training jobs on Primus-SaFE, with the options of the script of the same name of AMD-AGI/Primus:
#
#   bash examples/run_k8s_pretrain.sh --url URL create --replica 2 --gpu 8 --exp FILE --image IMAGE [--lr 1e-4 ...]
#   bash examples/run_k8s_pretrain.sh --url URL get|delete --workload-id ID
#   bash examples/run_k8s_pretrain.sh --url URL list|nodes
#
# Options of create: --replica, --cpu, --gpu, --backend, --exp, --data_path, --image, --hf_token, --workspace, --nodelist.
# Set HF_TOKEN instead of --hf_token, which other users of this machine can see. PRIMUS_DRY_RUN=1 sends nothing.

set -euo pipefail
# shellcheck source=examples/primus_variables.sh
source "$(dirname "${BASH_SOURCE[0]}")/primus_variables.sh"

options=()
overrides=()
command=
has_image=
while (($#)); do
    case "$1" in
        -h | --help) show_usage ;;
        create | get | delete | list | nodes) command=$1 ;;
        --hf_token)
            (($# > 1)) || fail "$1 needs a value"
            note "--hf_token is visible to other users of this machine: set HF_TOKEN instead"
            export HF_TOKEN=$2
            shift
            ;;
        --url | --workload-id | --replica | --cpu | --gpu | --backend | --exp | --data_path | --image | --workspace | --nodelist)
            (($# > 1)) || fail "$1 needs a value"
            [[ $1 != --image ]] || has_image=1
            options+=("${1//_/-}" "$2")
            shift
            ;;
        --*=*) overrides+=("$1") ;;
        --*)
            (($# > 1)) || fail "$1 needs a value"
            overrides+=("$1" "$2")
            shift
            ;;
        *) fail "unexpected word '$1'" "bash $0 --help" ;;
    esac
    shift
done
[[ -n $command ]] || fail "no command" "create, get, delete, list or nodes"
case "$command" in
    create)
        [[ " ${options[*]-} " == *" --exp "* ]] || fail "create needs --exp FILE"
        [[ -n $has_image ]] || options+=(--image "${DOCKER_IMAGE:-$DEFAULT_IMAGE}")
        [[ " ${options[*]} " == *" --workspace "* ]] || options+=(--workspace primus-safe-pretrain)
        ;;
    get | delete)
        [[ " ${options[*]-} " == *" --workload-id "* ]] || fail "$command needs --workload-id ID"
        ;;
esac
report_variables
run_primus kubernetes "$command" ${options[@]+"${options[@]}"} ${overrides[@]+"${overrides[@]}"}
