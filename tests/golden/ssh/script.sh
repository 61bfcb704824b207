{
is_alive() {
    if [ -r /proc/self/stat ]; then
        read -r _ _ _ parent _ </proc/self/stat && [ "$parent" = $$ ]
    else
        kill -0 $$ 2>/dev/null
    fi
}
watch() {
    exec <&3 >/dev/null 2>&1 3<&-
    while read -r word; do
        case $word in INT|TERM|HUP|USR1|USR2) ! is_alive || kill -s "$word" $$ ;; esac
    done
    ! is_alive || kill -s TERM $$
    waited=0
    while is_alive; do
        [ $waited -lt 90 ] || kill -s KILL $$
        sleep 1
        waited=$((waited + 1))
    done
}
cd -- '/my work' || exit 1
place=$(mktemp -d) && mkfifo "$place/out" "$place/err" || exit 1
exec 3<&0 </dev/null
(cat; exec cat >/dev/null) <"$place/out" &
(cat; exec cat >/dev/null) <"$place/err" >&2 &
exec >"$place/out" 2>"$place/err"
watch &
exec 3<&-
rm -r -- "$place"
export A='it'"'"'s'
exec primus-cli direct -- runs list
}
