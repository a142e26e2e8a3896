// Command kube holds the programs of a one-node Kubernetes cluster, each as
// upstream ships it: etcd, kube-apiserver, kube-scheduler,
// kube-controller-manager and kubelet, and kubectl to look at it. The first
// argument says which one runs; a link with a program's name does so too.
//
// One executable instead of five, because four fifths of their code is common:
// it links once and takes a fifth of the disk. Each program still runs as its
// own process, since all of them claim the process-wide flag set, feature
// gates and metric registry.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// exitUsage is the exit status for a command line that names no program.
const exitUsage = 2

// programs maps a name to what it runs. A value returns the exit status of the
// process.
var programs = map[string]func() int{
	"etcd": func() int {
		etcdmain.Main(os.Args)
		return 0
	},
	"kube-apiserver":          func() int { return cli.Run(apiserver.NewAPIServerCommand()) },
	"kube-controller-manager": func() int { return cli.Run(controllermanager.NewControllerManagerCommand()) },
	"kube-scheduler":          func() int { return cli.Run(scheduler.NewSchedulerCommand()) },
	"kubectl":                 func() int { return cli.Run(kubectl.NewDefaultKubectlCommand()) },
	"kubelet":                 func() int { return cli.Run(kubeletCommand()) },
}

func kubeletCommand() *cobra.Command {
	return kubelet.NewKubeletCommand(context.Background())
}

func main() {
	name := filepath.Base(os.Args[0])
	if programs[name] == nil && len(os.Args) > 1 {
		// The programs parse os.Args themselves and take the first for their name.
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	run := programs[name]
	if run == nil {
		names := slices.Sorted(maps.Keys(programs))
		fmt.Fprintf(os.Stderr, "kube: the first argument must be a program: %s\n", strings.Join(names, ", "))
		os.Exit(exitUsage)
	}
	os.Exit(run())
}
