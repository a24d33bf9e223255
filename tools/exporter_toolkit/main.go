// Says of each web configuration file whether a program with Prometheus' exporter-toolkit starts
// with it: the error, or "" when it does. The answer is a JSON object on standard output.
//
//	go run . FILE...
package main

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/exporter-toolkit/web"
)

// starts gives the error with which the toolkit refuses the file: in its check, or when it serves.
func starts(path string) string {
	if err := web.Validate(path); err != nil {
		return err.Error()
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	server := &http.Server{
		Handler:  http.NotFoundHandler(),
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	ended := make(chan error, 1)
	logger := slog.New(slog.DiscardHandler)
	go func() { ended <- web.Serve(listener, server, &web.FlagConfig{WebConfigFile: &path}, logger) }()
	defer server.Close()
	// A server that does not come up says so before it accepts; one that does ends this handshake.
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		connection, err := net.DialTimeout("tcp", listener.Addr().String(), 5*time.Second)
		if err != nil {
			return
		}
		defer connection.Close()
		connection.SetDeadline(time.Now().Add(5 * time.Second))
		fmt.Fprint(tls.Client(connection, &tls.Config{InsecureSkipVerify: true}), "GET / HTTP/1.0\r\n\r\n")
	}()
	select {
	case err := <-ended:
		return err.Error()
	case <-answered:
	}
	select {
	case err := <-ended:
		return err.Error()
	case <-time.After(50 * time.Millisecond):
		return ""
	}
}

func version() string {
	build, _ := debug.ReadBuildInfo()
	for _, module := range build.Deps {
		if module.Path == "github.com/prometheus/exporter-toolkit" {
			return module.Version
		}
	}
	return "unknown"
}

func main() {
	errors := make(map[string]string)
	var lock sync.Mutex
	var all sync.WaitGroup
	slots := make(chan struct{}, 8)
	for _, path := range os.Args[1:] {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			found := starts(path)
			lock.Lock()
			defer lock.Unlock()
			errors[path] = found
		})
	}
	all.Wait()
	text, err := json.Marshal(map[string]any{"toolkit": version(), "go": runtime.Version(), "errors": errors})
	if err != nil {
		panic(err)
	}
	io.WriteString(os.Stdout, string(text)+"\n")
}
