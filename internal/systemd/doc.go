// Package systemd is what this program does with systemd's service manager: it tells
// whether the process is a service of one, makes the scope in which a supervisor's
// units outlive it, starts a supervisor as a transient service, installs the templates
// of contrib/systemd for a workspace, and writes to the journal.
//
// It talks to the manager through systemctl(1) and systemd-run(1), which are there
// wherever the manager is, work without a message bus, and cost nothing at the start
// of a program that never needs them. It knows directories and units, no workspaces.
package systemd
