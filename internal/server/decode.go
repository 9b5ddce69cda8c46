package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"reflect"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/forkd/forkd/internal/audit"
	"github.com/forkd/forkd/internal/sandbox"
)

const (
	maxBody     = 1 << 20
	maxCodeBody = 24 << 20 // exec and eval: the 16 MiB of stdin that the domain takes, in base64, and the rest

	bodyTimeout   = 30 * time.Second       // a client that sends its body slower holds nothing
	lingerTimeout = 500 * time.Millisecond // for what is on its way when the answer is given before the body came

	// What is read and thrown away of a body that is too large, so that a client that only reads the answer after it sent
	// everything gets to see it instead of a broken connection.
	drainLimit   = 256 << 20
	drainTimeout = 10 * time.Second
)

// decode reads one JSON object into dst, which is a pointer to a struct, and refuses what is not exactly that.
func decode(w http.ResponseWriter, r *http.Request, limit int64, dst any, required ...string) error {
	body, err := readBody(w, r, limit)
	if err != nil {
		return err
	}
	return unmarshal(body, dst, required...)
}

// decodeOptional is decode for a body that may be left out.
func decodeOptional(w http.ResponseWriter, r *http.Request, limit int64, dst any) error {
	body, err := readBody(w, r, limit)
	if err != nil || len(bytes.TrimSpace(body)) == 0 {
		return err
	}
	return unmarshal(body, dst)
}

// readBody reads the whole body, at most limit bytes.
func readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	if err := checkContentType(r); err != nil {
		return nil, err
	}
	tooLarge := &sandbox.Error{Code: codeBodyTooLarge,
		Message: fmt.Sprintf("the body is larger than the %d bytes that %s takes", limit, r.URL.Path),
		Hint:    "send less at a time"}
	if r.ContentLength > limit && r.Header.Get("Expect") != "" {
		return nil, tooLarge // the client waits for a word before it sends
	}
	n, room := noteOf(r.Context()), limit // what is to come is not always told
	if r.ContentLength >= 0 {
		room = min(limit, r.ContentLength)
	}
	if err := n.bodies.take(n.who, int(room)); err != nil {
		return nil, err
	}
	kept := 0
	defer func() {
		n.bodies.leave(n.who, int(room)-kept)
		n.hold(func() { n.bodies.leave(n.who, kept) })
	}()
	control := http.NewResponseController(w)
	stop := context.AfterFunc(n.draining, func() { _ = control.SetReadDeadline(time.Now()) }) // it has not begun to be answered
	defer stop()
	body, err := io.ReadAll(io.LimitReader(r.Body, limit+1))
	if err != nil {
		return nil, invalid("", "reading the body: %v", err)
	}
	if int64(len(body)) > limit {
		_ = control.SetReadDeadline(time.Now().Add(drainTimeout))
		_, _ = io.CopyN(io.Discard, r.Body, drainLimit)
		return nil, tooLarge
	}
	kept = min(len(body), int(room))
	n.params = audit.Redact(body)
	return body, nil
}

// checkContentType takes JSON, nothing, and what curl -d says unless told otherwise: the body is looked at in any case.
func checkContentType(r *http.Request) error {
	header := r.Header.Get("Content-Type")
	if header == "" {
		return nil
	}
	media, _, err := mime.ParseMediaType(header)
	if err == nil && (media == "application/json" || strings.HasSuffix(media, "+json") || media == "application/x-www-form-urlencoded") {
		return nil
	}
	return invalid("set Content-Type: application/json", "the body is %q, not JSON", header)
}

// unmarshal decodes one object, strictly.
func unmarshal(body []byte, dst any, required ...string) error {
	trimmed := bytes.TrimLeft(body, " \t\r\n")
	if len(trimmed) == 0 {
		return invalid(fieldsHint(dst), "the body is empty: a JSON object is needed")
	}
	if !utf8.Valid(body) {
		return invalid("", "the body is not JSON: it is not UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(dst); err != nil {
		return jsonError(err, dst)
	}
	if trimmed[0] != '{' { // a bare null decodes into everything
		return invalid(fieldsHint(dst), "the body is not a JSON object")
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return invalid("", "the body has something after the JSON object, at byte %d", dec.InputOffset())
	}
	return checkFields(body, dst, required)
}

// checkFields finds what decoding lets pass: fields that are absent or null, which it can't tell from zero, and those that are there twice or in
// another spelling, which other readers of the same body, such as the audit record, would take for something else.
func checkFields(body []byte, dst any, required []string) error {
	known := map[string]bool{}
	for _, name := range fieldNames(dst) {
		known[name] = true
	}
	null := map[string]bool{} // those that are there: whether they are null
	dec := json.NewDecoder(bytes.NewReader(body))
	_, err := dec.Token() // {
	for err == nil && dec.More() {
		var key json.Token
		var value json.RawMessage
		if key, err = dec.Token(); err != nil {
			break
		}
		name, _ := key.(string)
		if !known[name] {
			return invalid(fieldsHint(dst), "unknown field %q", shorten(name))
		}
		if _, twice := null[name]; twice {
			return invalid("", "field %q is there twice", name)
		}
		err = dec.Decode(&value)
		null[name] = string(value) == "null"
	}
	if err != nil {
		return invalid("", "the body is not JSON: %v", err)
	}
	for _, name := range required {
		if isNull, ok := null[name]; !ok || isNull {
			return invalid("", "field %q is missing", name)
		}
	}
	return nil
}

// jsonError says in the caller's words what a decoder found.
func jsonError(err error, dst any) error {
	var syntax *json.SyntaxError
	var wrongType *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return invalid("", "the body is not JSON: %v at byte %d", syntax, syntax.Offset)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return invalid("", "the body is not JSON: it ends in the middle")
	case errors.As(err, &wrongType) && wrongType.Field == "":
		return invalid(fieldsHint(dst), "the body is a JSON %s, not an object", wrongType.Value)
	case errors.As(err, &wrongType):
		return invalid("", "field %q is a %s: it must be %s", wrongType.Field, wrongType.Value, typeName(wrongType.Type))
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return invalid(fieldsHint(dst), "unknown field %s", name)
	}
	return invalid("", "the body is not JSON: %v", err)
}

// typeName is JSON's name of a Go type.
func typeName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64, reflect.Uint32:
		return "an integer"
	case reflect.Float64:
		return "a number"
	case reflect.String:
		return "a string"
	case reflect.Slice:
		return "an array"
	default:
		return "an object"
	}
}

// fieldsHint lists the fields that a struct takes.
func fieldsHint(dst any) string { return "fields: " + strings.Join(fieldNames(dst), ", ") }

func fieldNames(dst any) []string {
	t := reflect.TypeOf(dst).Elem()
	names := make([]string, 0, t.NumField())
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}
