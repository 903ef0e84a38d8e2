package supervisor

// SetSubscriberMax changes subscriberMax before a supervisor runs, and returns what
// undoes it.
func SetSubscriberMax(n int) func() {
	old := subscriberMax
	subscriberMax = n
	return func() { subscriberMax = old }
}

// Backoff is the delay before the next automatic start after n others.
var Backoff = backoff
