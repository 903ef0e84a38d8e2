// Package process starts processes and learns how they ended.
//
// It owns the spawn itself (clone into a cgroup with a pidfd, a session of its own,
// no parent-death signal: children outlive their supervisor), the exec helper that
// sets what only the new process can set, the per-unit subreaper shim of containment
// tier 3, and what is read of processes in /proc. It knows no units and no policy:
// who is started, signalled or restarted, and when, is the supervisor's business.
//
// A program that embeds the supervisor calls HelperMain first thing in main: the
// helper and the shim are the same binary, executed again through /proc/self/exe so
// that they are always of the same version, also after the file was replaced.
package process
