// device-plugin tells the kubelet of GPUs that do not exist, over the kubelet's real socket for device plugins: a node
// without accelerators then has nvidia.com/gpu to give, and pods that ask for them are scheduled, admitted and told
// the ids of theirs as by the vendor's plugin. No device node is mounted.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const resource = "nvidia.com/gpu"

type plugin struct {
	api.UnimplementedDevicePluginServer
	devices []*api.Device
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// ListAndWatch tells all devices once: they are never ill. The stream stays open, or the kubelet takes them away.
func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	if err := stream.Send(&api.ListAndWatchResponse{Devices: p.devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")},
		})
	}
	return response, nil
}

// serve registers with the kubelet. It returns when the kubelet was restarted, which removes the plugins' sockets and
// wants them to register anew.
func (p *plugin) serve(socket string) error {
	os.Remove(socket)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, p)
	go server.Serve(listener)
	defer server.Stop()

	connection, err := grpc.NewClient("unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	within, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(within, &api.RegisterRequest{
		Version: api.Version, Endpoint: filepath.Base(socket), ResourceName: resource,
	})
	if err != nil {
		return err
	}
	log.Printf("registered %d of %s", len(p.devices), resource)
	for err == nil {
		time.Sleep(time.Second)
		_, err = os.Stat(socket)
	}
	return fmt.Errorf("the kubelet was restarted: %w", err)
}

func main() {
	count := flag.Int("count", 8, "number of GPUs")
	flag.Parse()
	p := &plugin{}
	for i := range *count {
		p.devices = append(p.devices, &api.Device{ID: fmt.Sprintf("GPU-%d", i), Health: api.Healthy})
	}
	for {
		log.Print(p.serve(api.DevicePluginPath + "weightsync-gpus.sock"))
		time.Sleep(time.Second)
	}
}
