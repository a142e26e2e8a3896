package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestOnlyTheSeccompProfileIsTakenOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	before := `{"linux":{"resources":{"memory":{"limit":9223372036854771712}},"seccomp":{"defaultAction":"SCMP_ACT_ERRNO"}},"ociVersion":"1.2.1"}`
	if err := os.WriteFile(path, []byte(before), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := dropSeccomp(path); err != nil {
		t.Fatal(err)
	}
	after, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"linux":{"resources":{"memory":{"limit":9223372036854771712}}},"ociVersion":"1.2.1"}`; string(after) != want {
		t.Errorf("%s, not %s", after, want)
	}
}

func TestTheBundleIsFoundHoweverItIsSaid(t *testing.T) {
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		args []string
		want string
	}{
		{[]string{"--root", "/r", "create", "--bundle", "/b", "id"}, "/b"},
		{[]string{"create", "-b", "/b", "id"}, "/b"},
		{[]string{"create", "--bundle=/b", "id"}, "/b"},
		{[]string{"create", "id"}, here},
	}
	for _, c := range cases {
		if got, err := bundleOf(c.args); err != nil || got != c.want {
			t.Errorf("%v: %q, %v", c.args, got, err)
		}
	}
}
