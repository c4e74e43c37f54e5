/* SPDX-License-Identifier: GPL-2.0 */
/* Arguments of ioctls: structures that may grow. */
#ifndef VELLUM_SIZED_H
#define VELLUM_SIZED_H

#include <linux/uaccess.h>

/* Copies a structure whose size its first word says; what we do not know of it must be zero. */
static inline int copy_sized(void *to, size_t known, unsigned long from)
{
	u32 size;

	if (get_user(size, (u32 __user *)from))
		return -EFAULT;
	if (size < known)
		return -EINVAL;
	return copy_struct_from_user(to, known, (void __user *)from, size);
}

#endif /* VELLUM_SIZED_H */
