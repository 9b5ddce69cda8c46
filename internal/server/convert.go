package server

import (
	"strings"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/sandbox"
)

func imageInfo(i Image) api.ImageInfo {
	return api.ImageInfo{
		ID: i.ID, Name: i.Name, CreatedAtUnix: i.CreatedAt.Unix(), KernelVersion: i.KernelVersion, Suite: i.Suite,
		Packages: orEmpty(i.Packages), Python: i.Python,
		KernelBytes: i.Kernel.Bytes, InitramfsBytes: i.Initramfs.Bytes, RootfsBytes: i.Rootfs.Bytes, Public: i.Public,
	}
}

func poolStatus(p sandbox.PoolStatus) api.PoolStatus {
	return api.PoolStatus{Tag: p.Tag, Size: p.Size, Ready: p.Ready, Filling: p.Filling, Problem: p.Problem}
}

func snapshotInfo(s sandbox.Snapshot) api.SnapshotInfo {
	s.Pool.Tag = s.Tag
	return api.SnapshotInfo{
		Tag: s.Tag, ID: s.ID, Dir: s.Dir, CreatedAtUnix: s.CreatedAt.Unix(), BranchedFrom: s.BranchedFrom, Warning: s.Warning,
		Status: api.SnapshotInfoStatus(s.Status), Bootable: s.Bootable, Image: s.Image, MemMiB: s.MemMiB, VCPUs: s.VCPUs,
		Engine: s.Engine, EngineVersion: s.EngineVersion, Accel: s.Accel, Python: s.Python,
		MemoryLogicalBytes: s.LogicalBytes, MemoryPhysicalBytes: s.PhysicalBytes, VmstateBytes: s.DeviceBytes,
		Resident: s.Resident, ResidentBytes: s.ResidentBytes, BootWarmMS: millis(s.BootWarm), ParentTag: s.ParentTag, Pool: poolStatus(s.Pool), HasNetwork: s.HasNetwork, Network: networkOf(s.Network),
		PauseMS: millis(s.Pause), DiffMS: millis(s.DiffTime), DiffPhysicalBytes: s.DiffPhysicalBytes, DiffLogicalBytes: s.DiffLogicalBytes,
		Public: s.Public, Tenant: s.Tenant, Secrets: s.Secrets, Limits: limitsInfo(s.Limits),
	}
}

func snapshotDetail(s sandbox.Snapshot, parentHash string) api.SnapshotDetail {
	s.Pool.Tag = s.Tag
	return api.SnapshotDetail{
		Tag: s.Tag, ID: s.ID, Dir: s.Dir, CreatedAtUnix: s.CreatedAt.Unix(),
		MemoryLogicalBytes: s.LogicalBytes, MemoryPhysicalBytes: s.PhysicalBytes, VmstateBytes: s.DeviceBytes,
		ParentTag: orNull(s.ParentTag), ParentContentHash: orNull(parentHash), ChainDepth: len(s.Ancestors),
		Ancestors: orEmpty(s.Ancestors), Dependents: orEmpty(s.Dependents), ContentHash: s.ContentHash,
		BranchedFrom: s.BranchedFrom, Warning: s.Warning, Status: api.SnapshotDetailStatus(s.Status), Bootable: s.Bootable,
		Image: s.Image, MemMiB: s.MemMiB, VCPUs: s.VCPUs, Engine: s.Engine, EngineVersion: s.EngineVersion, Accel: s.Accel,
		Python: s.Python, Resident: s.Resident, ResidentBytes: s.ResidentBytes, BootWarmMS: millis(s.BootWarm), Pool: poolStatus(s.Pool),
		PauseMS: millis(s.Pause), DiffMS: millis(s.DiffTime), DiffPhysicalBytes: s.DiffPhysicalBytes, DiffLogicalBytes: s.DiffLogicalBytes,
		Recipe: recipe(s.Recipe), HasNetwork: s.HasNetwork, Network: networkOf(s.Network), Limits: limitsInfo(s.Limits),
		Public: s.Public, Tenant: s.Tenant, Secrets: s.Secrets,
	}
}

func recipe(r sandbox.Recipe) api.Recipe {
	out := api.Recipe{Image: r.Image, Probe: r.Probe, Env: map[string]string{}, WarmUp: mapped(r.WarmUp, func(w sandbox.WarmUp) api.WarmUp {
		return api.WarmUp{Kind: api.WarmUpKind(w.Kind), Code: w.Code}
	})}
	for _, kv := range r.Env {
		k, v, _ := strings.Cut(kv, "=")
		out.Env[k] = v
	}
	return out
}

func sandboxInfo(s sandbox.Sandbox) api.SandboxInfo {
	return api.SandboxInfo{
		ID: s.ID, SnapshotTag: s.SnapshotTag, SnapshotID: s.SnapshotID, State: api.SandboxInfoState(s.State), Reason: s.Reason,
		Netns: orNull(s.Netns), GuestAddr: orNull(s.GuestAddr), Network: networkOf(s.Network),
		CreatedAtUnix: s.CreatedAt.Unix(), DeadlineUnix: unixOrNull(s.Deadline), EndedAtUnix: unixOrNull(s.EndedAt),
		PID: s.PID, MemoryLimitMiB: orNull(s.MemoryLimitMiB), Limits: limitsInfo(s.Limits), Confinement: api.SandboxInfoConfinement(s.Confinement), HasBranched: s.BranchCount > 0, BranchCount: s.BranchCount,
		Path: s.Path, Env: s.Env, Metadata: metadata(s.Metadata), ReadyMS: millis(s.ReadyIn),
		Name: s.Name, AutoSuspendSecs: s.AutoSuspend.Seconds(), AutoResume: s.AutoResume, SuspendedAtUnix: unixOrZero(s.SuspendedAt),
		Tenant: s.Tenant, Secrets: s.Secrets, Conditions: conditions(s.Conditions),
	}
}

// conditions are absent when there are none.
func conditions(list []sandbox.Condition) (out []api.Condition) {
	for _, c := range list {
		out = append(out, api.Condition{Kind: api.ConditionKind(c.Kind), SinceUnixMS: c.Since.UnixMilli(), Count: c.Count, Detail: c.Detail})
	}
	return out
}

func sandboxStats(id string, u sandbox.Usage) api.SandboxStats {
	out := api.SandboxStats{ID: id, GuestAnonKiB: u.GuestAnonKiB, GuestSharedKiB: u.GuestSharedKiB, GuestPSSKiB: u.GuestPSSKiB, PSSKiB: u.PSSKiB, RSSKiB: u.RSSKiB,
		CPUSecs: u.Process.CPU.Seconds(), DiskReadBytes: u.Process.ReadBytes, DiskWrittenBytes: u.Process.WrittenBytes, StateBytes: u.StateBytes}
	if n := u.Traffic; n != nil {
		received, sent := int64(n.ReceivedBytes), int64(n.SentBytes)
		out.NetReceivedBytes, out.NetSentBytes = &received, &sent
	}
	return out
}

// mapped converts every element; the result is never nil, so that JSON shows [] and not null.
func mapped[A, B any](in []A, f func(A) B) []B {
	out := make([]B, 0, len(in))
	for _, a := range in {
		out = append(out, f(a))
	}
	return out
}

func orEmpty(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

func metadata(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

// orNull is nil for the zero value: published fields are always there, with null for "none".
func orNull[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

func unixOrNull(t time.Time) *int64 {
	if t.IsZero() {
		return nil
	}
	secs := t.Unix()
	return &secs
}

func unixOrZero(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.Unix()
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
