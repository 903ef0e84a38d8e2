package jobs

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"

	"mypr/internal/api"
	"mypr/internal/rpc"
)

const cursorPrefix = "mypr-shell1."

// cursor is a place in one stream of one job. It is opaque outside.
type cursor struct {
	Job    string `json:"j"`
	Stream string `json:"s,omitempty"`
	Offset int64  `json:"o"` // in the output file
}

var errCursor = errors.New("cursor beyond the end")

func (c cursor) String() string {
	raw, _ := json.Marshal(c) // strings and a number
	return cursorPrefix + base64.RawURLEncoding.EncodeToString(raw)
}

// parseCursor refuses a cursor of another job, stream or method.
func parseCursor(text *string, job, stream string) (cursor, error) {
	c := cursor{Job: job, Stream: stream}
	if text == nil {
		return c, nil
	}
	bad := func(why string) (cursor, error) {
		return c, rpc.Errorf(api.CodeInvalidCursor, "this cursor %s", why).
			WithHint("start without cursor=, and pass on only what read or expect of the same job and stream returned")
	}
	enc, ok := strings.CutPrefix(*text, cursorPrefix)
	if !ok {
		return bad("is not one of a shell job's read")
	}
	raw, err := base64.RawURLEncoding.DecodeString(enc)
	var got cursor
	if err != nil || json.Unmarshal(raw, &got) != nil || got.Offset < 0 {
		return bad("is damaged")
	}
	if got.Job != job {
		return bad("belongs to job " + got.Job)
	}
	if got.Stream != stream {
		return bad("belongs to the stream " + streamName(got.Stream) + ", not " + streamName(stream))
	}
	return got, nil
}

func streamName(s string) string {
	if s == "" {
		return "of both"
	}
	return s
}

func checkStream(s string) error {
	switch s {
	case "", stdout, stderr:
		return nil
	}
	return rpc.Errorf(rpc.CodeInvalidRequest, `stream is "stdout", "stderr" or None for both, not %.40q`, s)
}
