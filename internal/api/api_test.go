package api

import "testing"

func TestUpdatePending(t *testing.T) {
	for _, c := range []struct {
		manager, client string
		want            bool
	}{
		{"1.2.3", "1.2.3", false}, {"1.2.3", "1.2.4", true}, {"v0.0.0-1+dirty", "v0.0.0-1", true},
		{"devel", "1.2.3", false}, {"1.2.3", "devel", false}, {"unknown", "devel", false}, {"", "1", false},
		{"devel+0123456789ab", "devel+ba9876543210", true},
	} {
		if got := UpdatePending(c.manager, c.client); got != c.want {
			t.Errorf("manager %q, client %q: %v", c.manager, c.client, got)
		}
	}
}
