package client

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
)

// trust says which certificates of daemons are believed.
func trust(cfg Config) (*tls.Config, error) {
	out := &tls.Config{MinVersion: tls.VersionTLS12}
	file := cmp.Or(cfg.CAFile, cfg.Getenv("FORKD_CACERT"))
	if file == "" {
		return out, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("certificates to trust: %w", err)
	}
	out.RootCAs = x509.NewCertPool()
	if !out.RootCAs.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("certificates to trust: there is none in %s", file)
	}
	return out, nil
}
