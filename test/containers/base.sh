#!/bin/sh
# base.sh DIR: a root file system with a shell, a few tools and Python, copied from this machine.
set -eu
dir=$1
python=$(readlink -f "$(PATH=/usr/local/bin:/usr/bin:/bin command -v python3)")
stdlib=$("$python" -I -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
files="$python"
for tool in sh bash basename cat chmod chown cp cut date dirname env false getent grep head id install kill ln ls mkdir mktemp mv ps readlink rm sed seq setsid sleep sort stat tail test touch tr true uname wc; do
	files="$files /usr/bin/$tool"
done
mkdir -p "$dir/usr/bin" "$dir/usr/lib" "$dir/usr/lib64" "$dir/usr/sbin" "$dir/tmp" "$dir/proc" "$dir/sys" "$dir/dev" "$dir/run" "$dir/root" "$dir/etc" "$dir/var/tmp"
for d in bin lib lib64 sbin; do ln -s "usr/$d" "$dir/$d"; done
chmod 1777 "$dir/tmp" "$dir/var/tmp"
libs=$(ldd $files "$stdlib"/lib-dynload/*.so | sed -n 's/.*=> //; s/^[ \t]*\(\/[^ ]*\) (0x.*/\1/p' | sort -u)
cp -L --parents $files $libs "$dir"
cp -r --parents "$stdlib" "$dir"
ln -sf "$python" "$dir/usr/bin/python3"
echo "root:x:0:0:root:/root:/bin/sh" > "$dir/etc/passwd"
echo "root:x:0:" > "$dir/etc/group"
cp /etc/os-release "$dir/etc"
