package bench

import (
	"cmp"
	"context"
	"math"
	"slices"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// forkOne starts one child, cold.
func forkOne(ctx context.Context, c *client.Client, tag string) (id string, err error) {
	list, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: tag, N: client.Int(1), Path: api.ForkRequestPathCold})
	if err != nil {
		return "", err
	}
	return list[0].ID, nil
}

// counts lists texts, the most frequent one first.
func counts(of map[string]int) (list []Count) {
	for text, n := range of {
		list = append(list, Count{text, n})
	}
	slices.SortFunc(list, func(a, b Count) int { return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Error, b.Error)) })
	return list
}

func mib(bytes int64) float64 { return round2(float64(bytes) / (1 << 20)) }

func round2(f float64) float64 { return math.Round(f*100) / 100 }

// ratio is 0 when there is nothing to compare with.
func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return round2(a / b)
}
