// network-policies enforces NetworkPolicies on this node: it answers for the first packet of each connection, which the
// kernel hands it by NFQUEUE. The rules that hand them over are kube-network-policies' own, which need CONFIG_NFT_QUEUE;
// on a kernel without it cluster.sh adds one with iptables.
package main

import (
	"context"
	"flag"
	"log"
	"os/signal"
	"syscall"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "of a client that may read pods, namespaces and NetworkPolicies")
	node := flag.String("node", "", "name of this node")
	queue := flag.Int("queue", 100, "number of the NFQUEUE")
	flag.Parse()

	until, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Fatal(err)
	}
	watched := informers.NewSharedInformerFactory(client, 0)
	controller, err := networkpolicy.NewController(
		client,
		watched.Networking().V1().NetworkPolicies(),
		watched.Core().V1().Namespaces(),
		watched.Core().V1().Pods(),
		nil, nil, nil, nil, // no AdminNetworkPolicies
		networkpolicy.Config{QueueID: *queue, NodeName: *node},
	)
	if err != nil {
		log.Fatal(err)
	}
	watched.Start(until.Done())
	if err := controller.Run(until); err != nil {
		log.Fatal(err)
	}
}
