package qemu

import (
	"context"
	"strings"
	"testing"
	"time"
)

func TestSelfTestPassesUnderEmulation(t *testing.T) {
	if err := selfTest(t.Context(), needQEMU(t), AccelTCG, "max"); err != nil {
		t.Error(err)
	}
}

func TestSelfTestNamesWhatACPULacks(t *testing.T) {
	err := selfTest(t.Context(), needQEMU(t), AccelTCG, "max,cx16=off")
	if err == nil || !strings.Contains(err.Error(), "cmpxchg16b") {
		t.Errorf("on a CPU without cmpxchg16b: %v, want an error that names it", err)
	}
}

func TestKVMWorksAnswersInBoundedTime(t *testing.T) {
	start := time.Now()
	err := KVMWorks(context.Background(), needQEMU(t))
	if took := time.Since(start); took > maxTestLimit+5*time.Second {
		t.Errorf("took %v", took)
	}
	t.Logf("KVM on this host: %v", err)
}
