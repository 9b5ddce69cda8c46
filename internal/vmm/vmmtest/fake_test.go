package vmmtest_test

import (
	"testing"

	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

func TestMain(m *testing.M) { vmmtest.Main(m) }
