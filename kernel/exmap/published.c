// SPDX-License-Identifier: GPL-2.0
/* The interface of the published module. include/uapi/vellum/exmap_published.h describes it. */

#include <linux/file.h>
#include <linux/uaccess.h>
#include <vellum/exmap_published.h>

#include "exmap/exmap.h"

static noinline long exmap_published_ioctl_setup(struct exmap *exmap, unsigned long argument)
{
	struct exmap_published_setup setup;

	if (copy_from_user(&setup, (void __user *)argument, sizeof(setup)))
		return -EFAULT;
	/* The flags are ignored: programs do not set them. */
	return exmap_create(exmap, &(struct vellum_exmap_create){
		.interfaces = setup.max_interfaces,
		.flags = VELLUM_EXMAP_PINNABLE,
		.frames = setup.buffer_size,
		.backing = max(setup.fd, -1),
	});
}

static long exmap_published_ioctl_action(struct exmap *exmap, unsigned long argument)
{
	static const unsigned int commands[] = {
		[EXMAP_PUBLISHED_OP_ALLOC] = VELLUM_EXMAP_ALLOC,
		[EXMAP_PUBLISHED_OP_FREE] = VELLUM_EXMAP_FREE,
	};
	struct exmap_published_action action;

	if (copy_from_user(&action, (void __user *)argument, sizeof(action)))
		return -EFAULT;
	if (action.opcode >= ARRAY_SIZE(commands) || !commands[action.opcode])
		return -EINVAL;
	return exmap_vector(exmap, commands[action.opcode], action.interface, action.iov_len, true);
}

static long exmap_published_ioctl_clone(struct file *file, unsigned long argument)
{
	struct file *other = fget(argument);
	int error;

	if (!other)
		return -EBADF;
	error = exmap_become_clone(file, other);
	fput(other);
	return error;
}

static noinline long exmap_published_ioctl_stats(struct exmap *exmap, unsigned long argument)
{
	struct exmap_published_stats stats = {};

	if (exmap_is_created(exmap)) {
		stats.flags = 1;
		stats.buffer_size = exmap->pool.frames;
		stats.alloc_count = frame_pool_resident(&exmap->pool);
		stats.max_interfaces = exmap->interfaces;
	}
	return copy_to_user((void __user *)argument, &stats, sizeof(stats)) ? -EFAULT : 0;
}

long exmap_published_ioctl(struct exmap *exmap, struct file *file, unsigned int command,
			   unsigned long argument)
{
	if (likely(command == EXMAP_PUBLISHED_ACTION))
		return exmap_published_ioctl_action(exmap, argument);
	switch (command) {
	case EXMAP_PUBLISHED_SETUP:
		return exmap_published_ioctl_setup(exmap, argument);
	case EXMAP_PUBLISHED_CLONE:
		return exmap_published_ioctl_clone(file, argument);
	case EXMAP_PUBLISHED_STATS:
		return exmap_published_ioctl_stats(exmap, argument);
	}
	return -ENOTTY;
}
